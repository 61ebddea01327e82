"""`VisionSpec`: a vision tower, its placeholders, and how its images are prepared.

Read by both sides: text workers prepare images by it, the engine builds the tower. Knows no torch.
"""

from __future__ import annotations

import msgspec

from tokenmill.model.vision.resize import SizeRule


class AxialBlocks(msgspec.Struct, frozen=True):
    """Blocks of a tower such as Gemma 4's: norms before and behind, and a rotary embedding for each axis.

    Attributes:
        num_kv_heads, head_dim: of their attention. num_positions: of each axis.
        clips: inputs and outputs of matrices have bounds. standardizes: averages are shifted and scaled.
    """

    num_kv_heads: int
    head_dim: int
    num_positions: int
    eps: float
    clips: bool
    standardizes: bool


class VisionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A vision tower, its placeholders, and the limits of its images.

    Attributes:
        depth: blocks. hidden_size, intermediate_size, num_heads: of each of them. out_size: of the text model.
        is_gated: blocks have RMSNorm and SwiGLU, as in Qwen2.5-VL; else LayerNorm and GELU.
        is_pooled: an embedding is the average of the patches that are merged, normed and projected, as in Gemma 3; else
            they stand side by side before an MLP.
        axial: the blocks are of that kind, and embeddings are averages; None: they are not.
        deepstack: the blocks whose output also goes into the text model, behind its layers 0, 1, ...
        window: side of the squares that attention stays within, in merged patches; 0: it is within the image.
        full_blocks: the blocks that attend to the whole image in spite of that.
        table_side: side of the square of learned positions; 0: absent.
        theta: base of the rotary embedding; 0: absent.
        merge: patches in each direction that become one embedding. frames: how often an image is repeated.
        sections: frequencies of the text model's rotary embedding that turn by time, row and column; (): an image's
            tokens turn as text does.
        is_interleaved: these take turns; else they follow each other.
        takes_videos: videos are spans of their own for each pair of frames.
        tokens_per_second: positions of a second of a video, whose frames have no text between them; 0: the time stands
            before each pair as text.
        min_pixels, max_pixels: to which an image is resized. side, filter, most_tokens: see `SizeRule`.
        min_video_pixels, max_video_pixels: to which all frames of a video are, together; each, with
            `tokens_per_second`.
        frame_tokens: embeddings of one frame at most; 0: only a video is bounded.
        video_tokens: of which nine tenths bound a video whose frames are resized one by one; 0: it is not bounded.
        mean, std: of each channel, on a scale of 0 to 1.
        image_token_id, video_token_id: their placeholders; one and the same where videos are not taken. start_token_id,
            end_token_id: what stands around them.
        is_start_shown: a template shows the token before an image alone; the rest is put behind it, in empty lines.
        is_image_shown: a template shows the placeholder alone; what stands around it is put there.
        stand_in_id: token that the text model is told in the place of placeholders; None: the placeholder.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_size: int
    is_gated: bool = False
    is_pooled: bool = False
    axial: AxialBlocks | None = None
    deepstack: tuple[int, ...] = ()
    window: int = 0
    full_blocks: tuple[int, ...] = ()
    table_side: int = 0
    theta: float
    patch_size: int
    merge: int
    frames: int
    sections: tuple[int, int, int] | tuple[()]
    is_interleaved: bool = True
    takes_videos: bool = True
    tokens_per_second: float = 0.0
    min_pixels: int = 0
    max_pixels: int = 0
    side: int = 0
    filter: str = "BICUBIC"
    most_tokens: int = 0
    min_video_pixels: int = 0
    max_video_pixels: int = 0
    frame_tokens: int = 0
    video_tokens: int = 0
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_token_id: int
    video_token_id: int
    start_token_id: int
    end_token_id: int
    is_start_shown: bool = False
    is_image_shown: bool = False
    stand_in_id: int | None = None

    @property
    def factor(self) -> int:
        """Divisor of the height and the width of an image, in pixels."""
        return self.patch_size * self.merge

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Tokens that text must not spell."""
        return self.image_token_id, self.video_token_id, self.start_token_id, self.end_token_id

    def size_rule(self, num_frames: int = 0) -> SizeRule:
        """Return the rule that resizes images or, with `num_frames`, the frames of a video of that many."""
        if not num_frames:
            rule = SizeRule(self.factor, self.min_pixels, self.max_pixels, side=self.side, filter=self.filter)
            return msgspec.structs.replace(rule, most_tokens=self.most_tokens)
        most = self.max_video_pixels
        if self.tokens_per_second:
            if self.video_tokens:
                share = int(self.video_tokens * self.factor**2 * 0.9) * self.frames // num_frames
                most = max(min(most, share), int(1.05 * self.min_video_pixels))
            return SizeRule(self.factor, self.min_video_pixels, most)
        if self.frame_tokens:
            own = min(self.frame_tokens * self.factor**2, most // num_frames)
            most = num_frames * max(own, int(1.05 * self.min_video_pixels))
        return SizeRule(self.factor, self.min_video_pixels, most, num_frames, self.frames)
