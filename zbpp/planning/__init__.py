"""Planning for a model: schedule, layers per chunk and recomputed layers together.

layer_plans        layers to chunks, with a schedule: `plan_layers`
recompute_plans    which layers are recomputed, with a schedule
resolve            what a pipeline is asked for -> a schedule, a memory model
resolve_layers     the same where layers have costs: `choose_split`
"""
