"""The methods:

What is sent (`plan`), the engines that send it, and each paper's own mathematics in a file of its own.
"""
