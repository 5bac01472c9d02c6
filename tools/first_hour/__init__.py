"""Recording of a newcomer's first hour: python -m tools.first_hour."""
