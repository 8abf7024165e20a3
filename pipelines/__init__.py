"""The notebook runner, the notebook cleaner, the results index and the benchmarks."""

import sys

#: jsonschema's check of IRIs, which no notebook has, takes a second to import, and every stage would.
sys.modules["rfc3987_syntax"] = None
