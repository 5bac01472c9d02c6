"""Mixtures of experts: the router, the experts as grouped matrix products, and the dispatch of tokens."""
