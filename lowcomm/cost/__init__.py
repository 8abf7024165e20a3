"""What a method costs:

The simulator, the replay of recorded runs, predictions of time, bytes and memory, the planner.
"""
