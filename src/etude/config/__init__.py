"""YAML to validated config, the component registry, overrides."""
