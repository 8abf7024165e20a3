"""Low-communication training of language models: the algorithms of four papers, composable."""
