"""The decoder that the papers train.

The modules hold its sizes, its parameters and FLOPs in closed form, the ranks of its matrices, and how it is read from
and written to Hugging Face folders.
"""
