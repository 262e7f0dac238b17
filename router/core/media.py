"""What images, audio, video and files cost, without reading them.

Base64 is never counted as text: a 2 MB picture is about a thousand tokens, not 600,000. Sizes are read from the length
of the base64 only. Constants are middles of what vision and audio models document, not of any one model:

    image   low 85, else 1100       OpenAI's vision guide: `low` 85; `high` 85 + 170 a tile, 1105 for 2048 x 4096
    audio   25 tokens a second      Qwen2-Audio 25/s; OpenAI 10/s; Ultravox 6.25/s
            wav 32,000 bytes/s      16 kHz, 16 bit, one channel
            else 16,000 bytes/s     mp3 at 128 kbit/s
    video   4096                    about 16 sampled frames of 256 tokens
    file    1000 + bytes/4096, at most 4000     a page of PDF is some 500 tokens and mostly fonts and images
"""

from collections.abc import Callable
from typing import Any

__all__ = ["MEDIA", "audio_tokens", "embeds_tokens"]

IMAGE = 1100
IMAGE_LOW = 85
AUDIO_PER_S = 25
AUDIO_BYTES_PER_S = {"wav": 32_000, "pcm16": 48_000}
AUDIO_BYTES_PER_S_ELSE = 16_000
AUDIO_UNKNOWN = 30 * AUDIO_PER_S
VIDEO = 4096
FILE = 1000
FILE_BYTES_PER_TOKEN = 4096
FILE_MOST = 4000
EMBEDS_BYTES_PER_TOKEN = 8192  # a hidden size of 4096 in 16 bit


def audio_tokens(size: int, form: str | None = None) -> int:
    """Tokens of `size` bytes of audio in the format `form` (`wav`, `mp3`, ...)."""
    rate = AUDIO_BYTES_PER_S.get(form or "", AUDIO_BYTES_PER_S_ELSE)
    return 1 + size * AUDIO_PER_S // rate


def embeds_tokens(encoded: int) -> int:
    """Tokens of one `prompt_embeds` tensor whose base64 is `encoded` characters long."""
    return 1 + encoded * 3 // 4 // EMBEDS_BYTES_PER_TOKEN


def _image(part: dict[str, Any]) -> int:
    inner = part.get("image_url")
    detail = inner.get("detail") if isinstance(inner, dict) else part.get("detail")
    return IMAGE_LOW if detail == "low" else IMAGE


def _audio(part: dict[str, Any]) -> int:
    inner = part.get("input_audio")
    if not isinstance(inner, dict):
        inner = part
    data, form = inner.get("data"), inner.get("format")
    if not isinstance(data, str):
        return AUDIO_UNKNOWN
    return audio_tokens(len(data) * 3 // 4, form if isinstance(form, str) else None)


def _audio_url(part: dict[str, Any]) -> int:
    inner = part.get("audio_url")
    url = inner.get("url") if isinstance(inner, dict) else inner
    if not isinstance(url, str) or not url.startswith("data:"):
        return AUDIO_UNKNOWN
    return audio_tokens(len(url) * 3 // 4, "wav" if "wav" in url[:32] else None)


def _file(part: dict[str, Any]) -> int:
    for key in ("file", "source"):
        inner = part.get(key)
        if isinstance(inner, dict):
            part = inner
    data = part.get("file_data", part.get("data"))
    size = len(data) * 3 // 4 if isinstance(data, str) else 0
    return min(FILE_MOST, FILE + size // FILE_BYTES_PER_TOKEN)


def _video(_part: dict[str, Any]) -> int:
    return VIDEO


#: `type` of a content part -> its tokens.
MEDIA: dict[str, Callable[[dict[str, Any]], int]] = {
    "image_url": _image,
    "input_image": _image,
    "image": _image,
    "image_embeds": _image,
    "computer_screenshot": _image,
    "image_generation_call": _image,
    "input_audio": _audio,
    "audio_url": _audio_url,
    "file": _file,
    "input_file": _file,
    "document": _file,
    "video_url": _video,
    "input_video": _video,
    "video": _video,
}
