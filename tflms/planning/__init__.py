"""Costs, simulation and plans: what a rewrite will do before it is done."""
