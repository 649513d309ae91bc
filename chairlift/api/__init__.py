"""The OpenAI API over HTTP. See ``app.py`` for the routes."""
