"""The schema's history, forward only. A new step gets the next number, and `HEAD` in the schema names it."""
