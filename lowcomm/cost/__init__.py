"""The costs of a method in time, bytes, memory and loss.

The modules are the simulator, the replay of recorded runs, predictions of time, bytes and memory, and the planner.
"""
