"""What modules are written of: blocks of lines, by the shape of the samples that come in.

A block is text: lines of `__init__`, `---`, lines of `forward`. In it

    «a¦b¦c»         is a choice; choices stand in each other
    {m}             a name that no other block has
    {c} {o} {t}     channels (or the width of a token), any number of new ones, tokens
    {last} {sample} length of the last dimension, all lengths
    {half}          half of the channels, or of a token's width

What does not fit a shape is left out by whoever writes the module down: torch says so.
"""

ANY = {
    "activation": """
        self.{m} = nn.«ReLU()¦GELU()¦Tanh()¦SiLU(inplace=True)¦ReLU(inplace=True)¦ELU()¦Softplus()¦
        Hardswish()¦LeakyReLU(0.1)¦PReLU()¦Sigmoid()¦Mish()¦Identity()¦PReLU({c})»
        ---
        x = self.{m}(x)""",
    "function": """
        ---
        x = «F.relu(x)¦torch.tanh(x)¦F.gelu(x)¦x.sigmoid()¦F.silu(x)¦F.softplus(x)¦
        torch.exp(-x.abs())¦F.leaky_relu(x, 0.2)¦F.hardtanh(x)¦torch.sin(x)¦
        torch.where(x > 0, x, 0.1 * x)¦torch.clamp(x, -1.0, 1.0)¦x / (1 + x.abs())¦
        torch.sqrt(x.square() + 0.1)»""",
    "in place": """
        ---
        x = x * 1.5
        «x.relu_()¦x.add_(0.5)¦x.mul_(0.5)¦F.relu(x, inplace=True)¦x.tanh_()¦x.clamp_(min=-0.5)¦
        torch.relu_(x)»""",
    "view in place": """
        ---
        x = x * 1.5
        {m} = x[:, :1]
        «{m} += 1¦{m}.mul_(0.5)¦{m}.relu_()¦x[:, 0] = 0.5¦x[:, :1] *= 2»
        x = x + 1""",
    "assigned part": """
        ---
        x = x * 1.5
        «x[:, :1] = 0.5¦x[:, 0] = x[:, -1]¦x[x > 1] = 1.0¦x[..., 0] *= 2»""",
    "without gradients": """
        ---
        with torch.«no_grad()¦inference_mode()»:
            {m} = torch.tanh(x)
        x = x * {m}""",
    "full precision": """
        ---
        with torch.autocast('cpu', enabled=False):
            x = torch.sin(x) * 2""",
    "stacked": """
        ---
        x = torch.stack([x, x.abs(), torch.tanh(x)])«.mean(0)¦.sum(0)¦[1]¦.amax(0)»""",
    "arithmetic": """
        ---
        «x = x * 2 + 1¦x = 1 - x¦x = x / 2¦x += 0.1¦x *= 0.7¦x = x - x.detach() * 0.1¦x = -x¦
        x = x ** 2¦x = torch.add(x, 0.5)»""",
    "double": """
        ---
        x = x«.clone()¦.contiguous()¦» + x""",
    "dropout": """
        self.{m} = «nn.Dropout(0.3)¦nn.Dropout(0.0)¦nn.Dropout(0.2, inplace=True)¦
        nn.AlphaDropout(0.3)¦nn.FeatureAlphaDropout(0.3)¦nn.Dropout1d(0.3)¦nn.Dropout2d(0.3)¦
        nn.Dropout3d(0.3)¦nn.RReLU()¦Noise(0.1)»
        ---
        x = self.{m}(x)""",
    "functional dropout": """
        ---
        x = F.«dropout(x, 0.3, self.training)¦dropout(x, p=0.2, training=self.training)¦
        dropout(x, 0.4, training=False)¦alpha_dropout(x, 0.2, self.training)¦
        dropout2d(x, 0.3, self.training)¦dropout(x, 0.25, self.training, True)¦
        rrelu(x, training=self.training)¦feature_alpha_dropout(x, 0.2, self.training)¦
        dropout1d(x, 0.3, self.training)¦dropout3d(x, 0.3, self.training)»""",
    "training branch": """
        ---
        if self.training:
            x = «x * 0.9¦x + 0.1 * torch.randn_like(x)¦F.relu(x)¦x + torch.rand_like(x) * 0.1¦
            x * (torch.rand_like(x) > 0.2)»""",
    "two branches": """
        ---
        if self.training:
            x = «x * 2¦torch.tanh(x)»
        else:
            x = «x * 1¦F.relu(x)»""",
    "scale": """
        self.{m} = nn.Parameter(torch.rand({last})«, requires_grad=False¦»)
        ---
        x = «x * self.{m}¦self.{m} * x + x¦x + self.{m}»""",
    "buffer": """
        self.register_buffer('{m}', torch.rand({last})«, persistent=False¦»)
        ---
        x = «x * self.{m}¦x + self.{m}»""",
    "table": """
        self.register_buffer('{m}', torch.rand(1, {sample})«, persistent=False¦»)
        ---
        x = x + self.{m}«¦[:, :x.size(1)]¦.expand_as(x)¦[0]»""",
    "unused": """
        self.{m} = «nn.Parameter(torch.rand(3))¦nn.Linear(4, 3)¦nn.BatchNorm1d(4)¦
        nn.Parameter(torch.rand(3), requires_grad=False)¦nn.Dropout(0.5)»
        ---
        x = x + 0.0""",
    "not reached": """
        self.{m} = nn.Linear(3, 3)
        ---
        if x.ndim == 17:
            x = self.{m}(x)""",
    "counter": """
        self.register_buffer('{m}', torch.zeros(«(), dtype=torch.long¦1»))
        ---
        «self.{m} += 1¦self.{m}.add_(1)¦self.{m} = self.{m} + 1»""",
    "state": """
        self.{m} = «Calls()¦itertools.count()¦[0]¦copy.deepcopy(self)»
        self.{m}t = nn.Linear(3, 3)
        ---
        with torch.no_grad():
            «for {m} in self.buffers(): {m} += 1¦
            for {m} in self.parameters(): {m}.data.clamp_(-9, 9)¦
            torch._foreach_mul_(list(self.{m}t.parameters()), 0.9)¦
            self.{m}t.load_state_dict(self.{m}t.state_dict())¦
            self.{m}t._parameters['weight'].copy_(F.normalize(self.{m}t._parameters['weight']))¦
            if isinstance(self.{m}, itertools.count): x = x * (1 + (next(self.{m}) > 5))¦
            if isinstance(self.{m}, Calls): x = x * self.{m}.more()¦
            if isinstance(self.{m}, list): self.{m}[0] += 1»""",
    "no state": """
        self.{m} = None
        self.{m}t = nn.Linear(3, 3)
        ---
        with torch.no_grad():
            «{m} = [p.clone().clamp_(-9, 9) for p in self.parameters()]¦
            {m} = torch._foreach_mul([p.detach() for p in self.parameters()], 0.9)¦
            {m} = {{name: p.norm() for name, p in self.{m}t.state_dict().items()}}¦
            {m} = copy.deepcopy(self.{m}t).load_state_dict(self.{m}t.state_dict())¦
            if self.{m} is None: self.{m} = x.shape[1]»""",
    "normalize": """
        ---
        x = «F.normalize(x, dim=1)¦F.softmax(x, dim=-1)¦F.layer_norm(x, x.shape[1:])¦
        x - x.mean(dim=1, keepdim=True)¦x.cumsum(-1)¦x.flip(1)¦F.normalize(x, dim=-1)¦
        x.roll(1, 1)¦x.sort(dim=-1).values¦F.log_softmax(x, 1)»""",
    "layer norm": """
        self.{m} = nn.«LayerNorm¦RMSNorm»(«{last}¦({sample},)»)
        ---
        x = self.{m}(x)""",
    "mixing": """
        ---
        x = «x - x.mean(0)¦x / x.std()¦x + x.flip(0)¦F.softmax(x, 0)¦x + x.roll(1, 0)¦
        x * x.shape[0]¦x + x.max()»""",
}


def _channels(d: int) -> dict[str, str]:
    """Of samples with channels and `d` further dimensions."""
    blocks = {
        "convolution": """
            self.{m} = nn.ConvNd({c}, {o}, 3«, padding=1¦, padding='same'¦, stride=2, padding=1¦
            , dilation=2, padding=2¦, padding=1, bias=False¦, padding=1, padding_mode='circular'¦»)
            ---
            x = self.{m}(x)""",
        "grouped": """
            self.{m} = nn.ConvNd({c}, {c}«¦*2», «3, padding=1¦1», groups=«{c}¦2»)
            ---
            x = self.{m}(x)""",
        "pointwise": """
            self.{m} = nn.ConvNd({c}, {o}, 1)
            ---
            x = self.{m}(x)""",
        "transposed": """
            self.{m} = nn.ConvTransposeNd({c}, {o}, «2, stride=2¦3, padding=1»)
            ---
            x = self.{m}(x)""",
        "functional convolution": """
            self.{m} = nn.Parameter(torch.randn({o}, {c}, *N*(3,)) * 0.3)
            ---
            x = F.convNd(x, self.{m}, padding=1)""",
        "batch norm": """
            self.{m} = «nn.BatchNormNd({c}«¦, momentum=None¦, momentum=0.3¦, affine=False¦
            , track_running_stats=False»)¦frozen(nn.BatchNormNd({c}))¦still(nn.BatchNormNd({c}))¦
            still(nn.BatchNormNd({c}), gone=True)¦
            StaysInEval(nn.BatchNormNd({c}))¦frozen(nn.BatchNormNd({c}), 'weight')¦
            StaysInEval(frozen(nn.BatchNormNd({c})))¦ActivatedNd({c})¦frozen(ActivatedNd({c}))¦
            ActivatedNd({c}, track_running_stats=False)»
            ---
            x = self.{m}(x)""",
        "instance norm": """
            self.{m} = nn.InstanceNormNd({c}«¦, affine=True»)
            ---
            x = self.{m}(x)""",
        "instance norm with statistics": """
            self.{m} = nn.InstanceNormNd({c}, track_running_stats=True)
            ---
            x = self.{m}(x)""",
        "group norm": """
            self.{m} = nn.«GroupNorm(2, {c})¦GroupNorm(1, {c})¦LocalResponseNorm(2)»
            ---
            x = self.{m}(x)""",
        "functional norm": """
            self.register_buffer('{m}', torch.zeros({c}))
            self.register_buffer('{m}v', torch.ones({c}))
            ---
            x = F.«batch_norm(x, self.{m}, self.{m}v, None, None, self.training)¦group_norm(x, 1)¦
            instance_norm(x)¦batch_norm(x, self.{m}, self.{m}v)»""",
        "pool": """
            self.{m} = nn.«MaxPoolNd(2)¦AvgPoolNd(2)¦AdaptiveAvgPoolNd(2)¦AdaptiveMaxPoolNd(2)¦
            MaxPoolNd(3, stride=1, padding=1)¦LPPoolNd(2, 2)»
            ---
            x = self.{m}(x)""",
        "functional pool": """
            ---
            x = F.«max_poolNd(x, 2)¦avg_poolNd(x, 2)¦adaptive_avg_poolNd(x, 3)»""",
        "resized": """
            ---
            x = F.«max¦avg»_poolNd(F.interpolate(x, scale_factor=2), 2)""",
        "flattened": """
            self.{m} = nn.Flatten()
            ---
            x = «self.{m}(x)¦torch.flatten(x, 1)¦x.flatten(1)¦x.view(x.size(0), -1)¦
            x.reshape(x.shape[0], -1)¦x.flatten(2).mean(-1)»""",
        "split": """
            ---
            a{m}, b{m} = x.chunk(2, 1)
            x = torch.cat([b{m}, a{m}], 1)""",
        "shuffled": """
            ---
            x = x.unflatten(1, (2, {half})).transpose(1, 2).flatten(1, 2)""",
        "squeeze": """
            self.{m} = nn.Sequential(nn.AdaptiveAvgPoolNd(1), nn.ConvNd({c}, {c}, 1), nn.Sigmoid())
            ---
            x = x * self.{m}(x)""",
        "spatial mean": """
            ---
            x = x.«mean¦amax¦sum»(«tuple(range(2, x.ndim))¦list(range(2, x.ndim))»)""",
    }
    return {name: text.replace("*N*", f"*{d} * ").replace("Nd", f"{d}d")
            for name, text in blocks.items()}  # fmt: skip


IMAGES = {
    **_channels(2),
    "tokens": """
        ---
        x = x.flatten(2).transpose(1, 2)""",
    "unshuffled": """
        ---
        x = F.pixel_unshuffle(x, 2)""",
    "padded": """
        ---
        x = F.pad(x, (1, 1, 1, 1)«¦, mode='reflect'»)""",
}
SIGNALS, VOLUMES = _channels(1), _channels(3)

_MHA = "nn.MultiheadAttention({c}, «2¦1», «dropout=0.2, ¦»«bias=False, ¦»batch_first=True)"

TOKENS = {
    "linear": """
        self.{m} = «nn.Linear({c}, {o}«¦, bias=False»)¦
        Matrix({c}, {o}, '«flat¦product¦linear»'«¦, 'w b'»)»
        ---
        x = self.{m}(x)""",
    "attention": f"""
        self.{{m}} = {_MHA}
        ---
        x = «x + self.{{m}}(x, x, x, need_weights=False)[0]¦self.{{m}}(x, x, x)[0]»""",
    "masked attention": f"""
        self.{{m}} = {_MHA}
        self.register_buffer('mask{{m}}', nn.Transformer.generate_square_subsequent_mask({{t}})
        «, persistent=False¦»)
        ---
        x = x + self.{{m}}(x, x, x, attn_mask=self.mask{{m}}, need_weights=False
        «, is_causal=True¦»)[0]""",
    "padded attention": f"""
        self.{{m}} = {_MHA}
        ---
        p{{m}} = (x[..., 0] > 1) & (torch.arange({{t}}) > 0)
        y{{m}}, «_ = self.{{m}}(x, x, x, key_padding_mask=p{{m}}, need_weights=False)¦
        w{{m}} = self.{{m}}(x, x, x, p{{m}}, attn_mask=torch.eye({{t}}, dtype=x.dtype))
        y{{m}} = y{{m}} + w{{m}} @ x»
        x = x + y{{m}}""",
    "padded attention, tokens first": """
        self.{m} = nn.MultiheadAttention({c}, «2¦1»«, dropout=0.2¦»)
        ---
        p{m} = (x[..., 0] > 1) & (torch.arange({t}) > 0)
        y{m} = x.transpose(0, 1)
        y{m} = self.{m}(y{m}, y{m}, y{m}, key_padding_mask=p{m})[0]
        x = x + y{m}.transpose(0, 1)""",
    "folded attention": f"""
        self.{{m}} = {_MHA}
        ---
        n{{m}} = x.shape[0]
        x = x.reshape(-1, {{t_half}}, {{c}})
        x = self.{{m}}(x, x, x, need_weights=False)[0]
        x = x.reshape(n{{m}}, {{t}}, {{c}})""",
    "cross attention": f"""
        self.{{m}} = {_MHA}
        self.q{{m}} = nn.Parameter(torch.randn(1, 2, {{c}}))
        ---
        x = self.{{m}}(self.q{{m}}.expand(x.shape[0], -1, -1), x, x)[0]""",
    "written attention": """
        self.{m} = Attention({c}, «2¦1», «0.2¦0.0», «True¦False»)
        ---
        x = x + self.{m}(x)""",
    "permuted attention": """
        self.{m} = nn.Linear({c}, {c} * 3)
        ---
        q{m}, k{m}, v{m} = self.{m}(x).reshape(x.shape[0], {t}, 3, «2¦1», -1).permute(2, 0, 3, 1, 4)
        «.unbind(0)¦»
        a{m} = torch.softmax(q{m} @ k{m}.transpose(-2, -1), -1) @ v{m}
        x = x + a{m}.transpose(1, 2).reshape(x.shape[0], {t}, {c})""",
    "biased attention": """
        self.{m} = nn.Linear({c}, {c} * 3)
        self.{m}b = nn.Parameter(torch.randn(2, «{t}¦1», {t}))
        self.{m}o = nn.Linear({c}, {c})
        ---
        q{m}, k{m}, v{m} = self.{m}(x).reshape(x.shape[0], {t}, 3, 2, -1).permute(2, 0, 3, 1, 4)
        s{m} = q{m} @ k{m}.transpose(-2, -1) + self.{m}b«¦.tanh()¦.mul(self.{m}b.mean())»
        a{m} = s{m}.softmax(-1) @ v{m}
        x = x + self.{m}o(a{m}.transpose(1, 2).reshape(x.shape[0], {t}, {c}))""",
    "attention with sinks": """
        self.{m} = nn.Linear({c}, {c} * 3)
        self.{m}s = nn.Parameter(torch.randn(2))
        self.{m}o = nn.Linear({c}, {c})
        ---
        q{m}, k{m}, v{m} = self.{m}(x).reshape(x.shape[0], {t}, 3, 2, -1).permute(2, 0, 3, 1, 4)
        s{m} = self.{m}s.view(1, 2, 1, 1).expand(x.shape[0], -1, {t}, -1)
        s{m} = torch.cat([q{m} @ k{m}.transpose(-2, -1), s{m}], -1).softmax(-1)[..., :-1]
        x = x + self.{m}o((s{m} @ v{m}).transpose(1, 2).reshape(x.shape[0], {t}, {c}))""",
    "tokens first": """
        ---
        x = x.transpose(0, 1)
        x = «x.cumsum(0)¦x.softmax(0)¦x.flip(0)¦torch.tanh(x.reshape(-1, {c})).view({t}, -1, {c})¦
        F.dropout(x, 0.2, self.training)¦x[1:]»
        x = x.transpose(0, 1)""",
    "encoder": """
        self.{m} = nn.TransformerEncoderLayer({c}, «2¦1», 8, dropout=«0.1¦0.0»
        «, norm_first=True¦», batch_first=True)
        ---
        x = self.{m}(x)""",
    "recurrent": """
        self.{m} = nn.«GRU¦LSTM¦RNN»({c}, {c}, «1¦2, dropout=0.2», batch_first=True)
        ---
        x = self.{m}(x)[0]""",
    "recurrent, last state": """
        self.{m} = nn.«GRU¦LSTM¦RNN»({c}, {c}, «1¦2, dropout=0.2», batch_first=True)
        ---
        y{m}, h{m} = self.{m}(x)
        x = y{m} + (h{m}[0] if isinstance(h{m}, tuple) else h{m})[-1].unsqueeze(1)""",
    "recurrent, tokens first": """
        self.{m} = nn.«GRU¦LSTM¦RNN»({c}, {c}«, bidirectional=True¦»)
        ---
        y{m}, _ = self.{m}(x.transpose(0, 1))
        x = x + y{m}«[-1].unsqueeze(1)¦.transpose(0, 1)»[..., :{c}]""",
    "attention, tokens first": """
        self.{m} = nn.MultiheadAttention({c}, «2¦1»«, dropout=0.2¦»)
        self.{m}n = nn.LayerNorm({c})
        self.{m}d = nn.Dropout(«0.0¦0.2»)
        self.{m}l = nn.Linear({c}, {c})
        ---
        x = x.permute(1, 0, 2)
        y{m} = self.{m}n(x)
        x = x + self.{m}d(self.{m}(y{m}, y{m}, y{m}, need_weights=False)[0])
        x = (x + F.relu(self.{m}l(x))).transpose(0, 1)""",
    "position": """
        self.{m} = nn.Parameter(torch.randn(«1, ¦»{t}, {c}))
        ---
        x = x + self.{m}""",
    "class token": """
        self.{m} = nn.Parameter(torch.randn(1, 1, {c}))
        ---
        x = torch.cat([self.{m}.«expand(x.shape[0], -1, -1)¦repeat(x.shape[0], 1, 1)», x], 1)""",
    "folded": """
        self.{m} = nn.«Linear({c}, {c})¦BatchNorm1d({c})¦LayerNorm({c})»
        ---
        x = self.{m}(x.reshape(-1, {c})).reshape(x.shape[0], {t}, {c})""",
    "one token": """
        ---
        x = x«[:, 0]¦.mean(1)¦.mean(dim=1)¦[:, -1]¦.amax(1)¦.flatten(1)»""",
    "transposed": """
        ---
        x = x.transpose(1, 2)""",
    "weighted": """
        self.{m} = nn.Linear({c}, 1)
        ---
        x = x * self.{m}(x).softmax(1)""",
}

VECTORS = {
    "linear": """
        self.{m} = «nn.Linear({c}, {o})¦nn.Linear({c}, {o}, bias=False)¦frozen(nn.Linear({c}, {o}))¦
        frozen(nn.Linear({c}, {o}), 'weight')¦frozen(nn.Linear({c}, {o}), 'bias')¦
        Matrix({c}, {o}, '«flat¦product¦linear»'«¦, 'w b'»)»
        ---
        x = self.{m}(x)""",
    "functional linear": """
        self.{m} = nn.Parameter(torch.randn({o}, {c}) * 0.3)
        self.{m}b = nn.Parameter(torch.rand(len(self.{m})))
        ---
        x = «F.linear(x, self.{m}, self.{m}b)¦x @ self.{m}.t() + self.{m}b¦
        torch.addmm(self.{m}b, x, self.{m}.t())»""",
    "twice": """
        self.{m} = nn.«Linear({c}, {c})¦Sequential(nn.Linear({c}, {c}), nn.Dropout(0.2))»
        ---
        x = self.{m}(F.relu(self.{m}(x)))""",
    "tied": """
        self.{m} = nn.Linear({c}, {c})
        self.{m}t = nn.Linear({c}, {c})
        self.{m}t.weight = self.{m}.weight
        ---
        x = self.{m}t(F.relu(self.{m}(x)))""",
    "tied by hand": """
        self.{m} = nn.Linear({c}, {o}«, bias=False¦»)
        ---
        x = F.linear(torch.tanh(self.{m}(x)), self.{m}.weight.t())""",
    "batch norm": """
        self.{m} = «nn.BatchNorm1d({c}«¦, momentum=None¦, affine=False»)¦
        frozen(nn.BatchNorm1d({c}))¦StaysInEval(nn.BatchNorm1d({c}))»
        ---
        x = self.{m}(x)""",
    "bilinear": """
        self.{m} = nn.Bilinear({c}, {c}, {o})
        ---
        x = self.{m}(x, x)""",
    "gated": """
        self.{m} = nn.Linear({c}, {c} * 2)
        ---
        x = F.glu(self.{m}(x), -1)""",
    "outer": """
        ---
        x = (x.unsqueeze(1) * x.unsqueeze(2)).mean(2)""",
    "signal": """
        ---
        x = x.«unflatten(1, (2, {half}))¦view(-1, 2, {half})¦reshape(x.shape[0], 2, -1)»""",
}

# Around other blocks, which keep the shape: `@` is where they stand.
AROUND = {
    "residual": """
        ---
        {m} = x
        @
        x = «x + {m}¦{m} + x¦torch.add(x, {m})¦x.add({m})»""",
    "residual in place": """
        ---
        {m} = x
        @
        x += {m}""",
    "dense": """
        ---
        {m} = x
        @
        x = torch.cat([{m}, x], 1)""",
    "gate": """
        ---
        {m} = x
        @
        x = {m} * torch.sigmoid(x)""",
    "while training": """
        ---
        {m} = x
        @
        x = x if self.training else {m}""",
}
