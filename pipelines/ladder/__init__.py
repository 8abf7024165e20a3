"""The ladder: runs of sizes x methods x seeds, each method tuned, trained one by one on any machine (`make ladder`).

A project of its own, with its own `params.yaml` and stages; `plan.yaml` says what is trained, tuned and repeated.
"""
