"""What is said: digits, letters and words of Asterisk's prompts, each with the file of its recording.

Words that sound like others ("for", "oh") are left out: letters could not tell them apart.
"""

from __future__ import annotations

from functools import cache

_ONES = "zero one two three four five six seven eight nine".split()
_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_FIRST = "first second third fourth fifth sixth seventh eighth ninth".split()
_TENTH = "tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth".split()
_TWENTIETH = "twentieth thirtieth fortieth fiftieth sixtieth seventieth eightieth ninetieth".split()
_LARGE = "hundred thousand million billion".split()
_DAYS = "sunday monday tuesday wednesday thursday friday saturday".split()
_MONTHS = "january february march april may june july august september october november december".split()
_SPELLED = (
    "alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike november oscar papa quebec romeo "
    "sierra tango uniform victor whiskey xray yankee zulu"
).split()
_AS_NAMED = {
    "": "activated added calling cancelled disabled enabled extension goodbye hello hours is location lowercase "
    "minute minutes number removed second seconds time uppercase with your",
    "digits/": "at dollars minus pound star today tomorrow yesterday",
    "dictate/": "pause paused playback record",
    "letters/": "asterisk dash dollar dot equals plus slash space",
    "vm-": "and first from last message messages no password press received saved",
}
"""Prefix -> names of files that are what is said in them."""
_OTHERS = {
    "auth-thankyou": "thank you",
    "call-forwarding": "call forwarding",
    "call-waiting": "call waiting",
    "conf-errormenu": "invalid choice",
    "conf-unmuted": "you are now unmuted",
    "dictate/playback_mode": "playback mode",
    "dictate/record_mode": "record mode",
    "do-not-disturb": "do not disturb",
    "hello-world": "hello world",
    "im-sorry": "im sorry",
    "is-in-use": "is in use",
    "is-set-to": "is set to",
    "letters/ascii37": "percent",
    "letters/ascii38": "ampersand",
    "letters/ascii40": "open parenthesis",
    "letters/ascii41": "close parenthesis",
    "letters/ascii44": "comma",
    "letters/ascii58": "colon",
    "letters/ascii59": "semicolon",
    "letters/ascii60": "less than",
    "letters/ascii62": "greater than",
    "letters/ascii63": "question mark",
    "letters/ascii92": "backslash",
    "letters/ascii95": "underscore",
    "one-moment-please": "one moment please",
    "please-try-again": "please try again",
    "queue-less-than": "less than",
    "speed-dial": "speed dial",
    "telephone-number": "telephone number",
    "to-extension": "to extension",
    "vm-Family": "family",
    "vm-Friends": "friends",
    "vm-INBOX": "new",
    "vm-Old": "old",
    "vm-Urgent": "urgent",
    "vm-Work": "work",
    "vm-deleted": "message deleted",
    "vm-extension": "extension",
    "vm-goodbye": "goodbye",
    "vm-minutes": "minutes",
    "vm-pls-try-again": "please try again",
    "vm-youhave": "you have",
    "you-entered": "you entered",
}


@cache
def recorded() -> dict[str, str]:
    """File of a recording, without its folder and ".wav" -> what is said in it, in small letters and spaces."""
    said = {f"digits/{number}": word for number, word in enumerate(_ONES + _TEENS)}
    said |= {f"digits/{10 * number}": word for number, word in enumerate(_TENS, 2)}
    said |= {f"digits/h-{number}": word for number, word in enumerate(_FIRST + _TENTH, 1)}
    said |= {f"digits/h-{10 * number}": word for number, word in enumerate(_TWENTIETH, 2)}
    said |= {f"digits/{word}": word for word in _LARGE} | {f"digits/h-{word}": f"{word}th" for word in _LARGE}
    said |= {f"digits/day-{number}": word for number, word in enumerate(_DAYS)}
    said |= {f"digits/mon-{number}": word for number, word in enumerate(_MONTHS)}
    said |= {f"letters/{letter}": letter for letter in "abcdefghijklmnopqrstuvwxyz"}
    said |= {f"phonetic/{word[0]}_p": word for word in _SPELLED}
    said |= {prefix + name: name for prefix, names in _AS_NAMED.items() for name in names.split()}
    return said | _OTHERS


@cache
def phrases() -> tuple[str, ...]:
    """Everything that is said, once, in the order of the alphabet."""
    return tuple(sorted(set(recorded().values())))
