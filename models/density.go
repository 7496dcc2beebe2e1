package models

// Density is how many tokens the server has counted for each one that [Client.Quote] reckoned a prompt at, at the
// most and at least 1. A prompt quoted that much higher is not quoted too low for a server that counts otherwise.
// Safe for concurrent use.
func (c *Client) Density() float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return max(c.density, 1)
}

// reportsUsage reports whether the server has reported usage, now or before.
func (c *Client) reportsUsage(now bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reports = c.reports || now
	return c.reports
}

// Learn takes from an answer how the server counts: a prompt reckoned at so many tokens was counted as u says. Safe for
// concurrent use.
func (c *Client) Learn(reckoned int, u Usage) {
	if reckoned <= 0 || u.Estimated {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.density = max(c.density, float64(u.PromptTokens)/float64(reckoned))
}
