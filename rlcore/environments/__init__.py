"""Text environments of other libraries: what a session plays instead of answering a question."""
