"""Plans for passes in parts: what computes and what communicates, on two lanes a stage.

problem     parts by number, as flat lists, and the rules of a list schedule
scheduler   one list schedule: who takes a lane that is free (in C too, `compiled/`)
plan        many of them, by rules that are drawn and then changed; the best is kept
"""
