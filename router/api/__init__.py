"""The people's door: parse, ask, answer. No policy is here."""
