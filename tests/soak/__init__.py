"""Soak test: real servers under random agents, faults and kills, with checks after each round.

`bin/soak --minutes 60 --seed 1` runs it from a clone. A seed decides the steps of the agents and
the faults with their times (`plan`); how far an agent gets by then depends on the machine.
"""
