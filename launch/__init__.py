"""The verbs: `python -m launch.VERB`, or `plimsoll VERB`. One module per verb, each with `main(argv=None) -> int`."""
