"""Published studies, as files for ``polarstep study``: results/ has their records."""
