package redact

// tokens are the vendors' tokens that the rules of gitleaks do not know, or know only at their full length or beside
// the vendor's name. Here a prefix and the beginning of the rest do, so that a token that was cut is known too.
var tokens = []rule{
	prefixed("jwt", `eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*)*`, "eyj"),

	// Models.
	prefixed("openai and others", `sk-[A-Za-z0-9_-]{10,}`, "sk-"),
	prefixed("groq", `gsk_[A-Za-z0-9]{16,}`, "gsk_"),
	prefixed("xai", `xai-[A-Za-z0-9]{16,}`, "xai-"),
	prefixed("nvidia", `nvapi-[A-Za-z0-9_-]{16,}`, "nvapi-"),
	prefixed("cerebras", `csk-[A-Za-z0-9]{20,}`, "csk-"),
	prefixed("perplexity", `pplx-[A-Za-z0-9]{16,}`, "pplx-"),
	prefixed("replicate", `r8_[A-Za-z0-9]{20,}`, "r8_"),
	prefixed("hugging face", `hf_[A-Za-z0-9]{20,}`, "hf_"),
	prefixed("langsmith", `lsv2_[a-z]{2}_[a-f0-9_]{16,}`, "lsv2_"),
	prefixed("tavily", `tvly-[A-Za-z0-9-]{16,}`, "tvly-"),
	prefixed("pinecone", `pcsk_[A-Za-z0-9_]{16,}`, "pcsk_"),

	// Code and packages.
	prefixed("github", `gh[pousr]_[A-Za-z0-9]{10,}`, "ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
	prefixed("github fine-grained", `github_pat_[A-Za-z0-9_-]{10,}`, "github_pat_"),
	prefixed("gitlab", `glpat-[A-Za-z0-9_.-]{10,}`, "glpat-"),
	prefixed("npm", `npm_[A-Za-z0-9]{20,}`, "npm_"),
	prefixed("pypi", `pypi-Ag[A-Za-z0-9_-]{10,}`, "pypi-ag"),
	prefixed("docker", `dckr_[po]at_[A-Za-z0-9_-]{16,}`, "dckr_pat_", "dckr_oat_"),
	prefixed("sonar", `sq[upa]_[a-f0-9]{40}`, "squ_", "sqp_", "sqa_"),

	// Clouds and databases.
	prefixed("aws", `(?:AKIA|ASIA)[A-Z0-9]{16}\b`, "akia", "asia"),
	prefixed("google", `AIza[A-Za-z0-9_-]{30,}`, "aiza"),
	prefixed("google oauth", `ya29\.[A-Za-z0-9_-]{10,}`, "ya29."),
	prefixed("google client", `GOCSPX-[A-Za-z0-9_-]{16,}`, "gocspx-"),
	prefixed("google refresh", `1//0[A-Za-z0-9_-]{30,}`, "1//0"),
	prefixed("digitalocean", `do[opr]_v1_[A-Za-z0-9]{20,}`, "doo_v1_", "dop_v1_", "dor_v1_"),
	prefixed("databricks", `dapi[a-f0-9]{16,}(?:-\d)?`, "dapi"),
	prefixed("supabase", `sbp_[A-Za-z0-9_]{16,}`, "sbp_"),
	prefixed("supabase secret", `sb_secret_[A-Za-z0-9_-]{16,}`, "sb_secret_"),
	prefixed("vault", `hv[sbr]\.[A-Za-z0-9_-]{16,}`, "hvs.", "hvb.", "hvr."),
	prefixed("terraform", `\.atlasv1\.([A-Za-z0-9_=-]{20,})`, ".atlasv1."),
	prefixed("tailscale", `tskey-[a-z]+-[A-Za-z0-9-]{16,}`, "tskey-"),
	prefixed("doppler", `dp\.(?:pt|st|ct|sa|scim)\.[A-Za-z0-9._-]{20,}`, "dp.pt.", "dp.st.", "dp.ct.", "dp.sa.", "dp.scim."),
	prefixed("age", `AGE-SECRET-KEY-1[A-Z0-9]{20,}`, "age-secret-key-1"),

	// Payment, post, work.
	prefixed("stripe", `[srp]k_(?:live|test)_[A-Za-z0-9]{8,}`,
		"sk_live_", "sk_test_", "rk_live_", "rk_test_", "pk_live_", "pk_test_"),
	prefixed("webhook secret", `whs(?:ec|k)_[A-Za-z0-9+/=_-]{6,}`, "whsec_", "whsk_"),
	prefixed("shopify", `shp[a-z]{2,3}_[A-Fa-f0-9]{16,}`,
		"shpat_", "shpca_", "shppa_", "shpss_", "shpua_", "shptka_"),
	prefixed("sendgrid", `SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}`, "sg."),
	prefixed("mailgun", `(?:pub)?key-[a-f0-9]{32}`, "key-", "pubkey-"),
	prefixed("linear", `lin_(?:api|oauth)_[A-Za-z0-9]{16,}`, "lin_api_", "lin_oauth_"),
	prefixed("atlassian", `AT[AC]TT3[A-Za-z0-9_=-]{20,}`, "atatt3", "atctt3"),
	prefixed("notion", `(?:ntn|secret)_[A-Za-z0-9]{40,}`, "ntn_", "secret_"),
	prefixed("figma", `fig[a-z]_[A-Za-z0-9_-]{20,}`, "figd_", "figu_", "figo_"),

	// Chat, and addresses that are a secret.
	prefixed("slack", `(?:xox[a-z]|xapp)-[A-Za-z0-9-]{8,}`, slackKeywords()...),
	{
		name: "slack webhook", keywords: []string{"hooks.slack.com/"},
		look: `(?i)hooks\.slack\.com/[a-z]+/([A-Za-z0-9/]+)`,
	},
	{
		name: "discord webhook", keywords: []string{"discord.com/api/", "discordapp.com/api/"},
		look: `(?i)discord(?:app)?\.com/api/(?:v\d+/)?webhooks/\d+/([A-Za-z0-9_-]+)`,
	},
	{name: "teams webhook", keywords: []string{".webhook.office.com/"}, look: `(?i)\.webhook\.office\.com/([^\s"'<>]+)`},
	{
		name: "zapier webhook", keywords: []string{"hooks.zapier.com/hooks/"},
		look: `(?i)hooks\.zapier\.com/hooks/[a-z]+/([A-Za-z0-9/]+)`,
	},
	{
		name: "feishu webhook", keywords: []string{"/open-apis/bot/v2/hook/"},
		look: `(?i)/open-apis/bot/v2/hook/([A-Za-z0-9-]+)`,
	},
	{name: "ifttt webhook", keywords: []string{"/with/key/"}, look: `(?i)/with/key/([A-Za-z0-9_-]{10,})`},
	{name: "telegram", keywords: []string{":aa", "%3aaa"}, find: telegramToken},
}

// prefixed is a rule for a token that begins with its keyword.
func prefixed(name, look string, keywords ...string) rule {
	return rule{name: name, keywords: keywords, bounded: look[0] != '\\', look: look}
}

// slackKeywords are the prefixes xoxa- to xoxz- and xapp-.
func slackKeywords() []string {
	all := []string{"xapp-"}
	for kind := 'a'; kind <= 'z'; kind++ {
		all = append(all, "xox"+string(kind)+"-")
	}
	return all
}

// telegramToken finds the secret of a bot's token, which stands after the number of the bot and a colon. The number is
// no secret.
func telegramToken(s string, at int) (from, to int) {
	const number, length = 6, 30
	digits := at
	for digits > 0 && at-digits < number && isDigit(s[digits-1]) {
		digits--
	}
	from = at + 1
	if s[at] == '%' {
		from = at + len("%3A")
	}
	to = from
	for to < len(s) && isToken(s[to]) {
		to++
	}
	if at-digits < number || to-from < length || s[from:from+2] != "AA" {
		return at, at
	}
	return from, to
}
