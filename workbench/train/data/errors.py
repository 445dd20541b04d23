"""Errors of data."""


class DataError(ValueError):
    """Data that is not there or does not fit the model; the text says what to do."""
