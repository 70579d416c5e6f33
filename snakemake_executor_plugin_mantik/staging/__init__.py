"""What lies where: local files, the site's manifest, bundles up, transfers down."""
