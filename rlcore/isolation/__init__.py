"""User code in processes with hard limits: it may hang, crash or leak without harm to others."""
