"""The shipped ranking recipe beside DIN on KuaiRand-Pure."""
