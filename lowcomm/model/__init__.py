"""The decoder that the papers train:

Its sizes, its parameters and FLOPs in closed form, and what its matrices look like.
"""
