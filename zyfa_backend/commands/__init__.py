"""One module per command group; each has `register(app)`, which adds its commands to the typer application."""
