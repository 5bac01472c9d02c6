"""What a run will need, told before it starts: see docs/plan.md."""
