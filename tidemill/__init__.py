"""Tidemill: a self-hosted OpenAI Batch API."""

__version__ = "0.1.0"
