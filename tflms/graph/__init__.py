"""The intermediate representation: operations, values and variables of a training graph."""
