"""Integrations of serving engines. Each is a separate package, imported only when it is used."""
