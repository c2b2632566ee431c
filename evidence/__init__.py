"""Does it train? The paper's kinds of application, dense beside compressed, on real ranks: ``python -m evidence``."""
