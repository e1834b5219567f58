"""The server of the browser, and its view in notebooks.

Imports views and model. Begin with app.py.
"""
