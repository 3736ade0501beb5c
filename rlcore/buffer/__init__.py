"""The ledger of prompts and the queue of rows."""
