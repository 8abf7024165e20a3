"""Training runs with the algorithms: their settings, data, the trainer, checkpoints and run folders."""

#: Set by a launcher to its process id: ranks stop when it is gone.
LAUNCHER_VARIABLE = "LOWCOMM_LAUNCHER"
#: Seconds that ranks have to write a checkpoint once they are told to stop.
SAVING_S = 300
