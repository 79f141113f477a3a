"""Inputs, checks, clocks and records: how operators are measured."""
