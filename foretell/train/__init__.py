"""Making heads: from prompts and a target to a head that the engine serves."""
