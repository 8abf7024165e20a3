"""How ranks communicate: World and its verbs, transports, the byte ledger, the link model and the clocks.

No other package of the library sends tensors through `torch.distributed` itself.
"""
