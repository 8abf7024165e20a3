"""How ranks talk: World and its verbs, transports, the byte ledger, the link model and the clocks.

No other room imports `torch.distributed`.
"""
