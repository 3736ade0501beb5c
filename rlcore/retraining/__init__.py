"""Retraining without Prefect: snapshots of data, the gate, the promoted model, who is active."""
