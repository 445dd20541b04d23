"""Errors of data."""


class DataError(ValueError):
    """Data that is not there or does not fit the model; the text says what to do."""


class OwnObjectError(ValueError):
    """An own object that cannot be loaded on this engine, or does not do what it is for."""
