"""Building packs: variant rows -> code objects -> verified packs -> wheels. Never imported at run time."""
