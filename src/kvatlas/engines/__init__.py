"""Engines that run on kvatlas, each in a package of its own, imported only when it is used."""
