"""An OpenAI-compatible endpoint in front of the replicas: requests in, trajectories out.

requests.py   what may be asked          prompts.py   which tokens the model reads
history.py    what a request continues   turns.py     turns and the trajectories they make
text.py       tokens as a client reads   answers.py   the JSON of answers and chunks
session.py    one session's requests     server.py    the port, tokens of access, streaming
"""
