"""Monitoring: a record for each attempt at a task, and metrics, tables and charts of records."""
