"""A step as data: what each rank executes, made from a plan and an experiment."""
