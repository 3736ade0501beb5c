"""LLM servers: engines, replicas, router and client."""
