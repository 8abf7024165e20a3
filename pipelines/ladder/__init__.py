"""The ladder: sizes x methods x seeds, each method tuned, trained point by point on any machine (`make ladder`).

A project of its own, with its own `params.yaml` and stages; `plan.yaml` says what is trained, tuned and repeated.
"""
