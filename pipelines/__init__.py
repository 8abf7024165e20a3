"""What serves this repository beside the library: launching runs, notebooks, measurements, the ladder and reports."""

import sys

#: jsonschema's check of IRIs, which no notebook has, takes a second to import, which every stage would spend.
sys.modules["rfc3987_syntax"] = None
