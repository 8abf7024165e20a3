"""The methods by which replicas train together.

These are the plan of what is sent (`plan`), the engines that send it, and each paper's own mathematics, in a file of
its own.
"""
