package skills

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/redact"
)

func TestPublicAddresses(t *testing.T) {
	for address, want := range map[string]bool{
		"1.1.1.1": true, "93.184.216.34": true, "2606:4700::1111": true, "2a00:1450::1": true,
		"127.0.0.1": false, "127.9.9.9": false, "10.1.2.3": false, "172.16.0.1": false, "192.168.1.1": false,
		"169.254.169.254": false, "0.0.0.0": false, "0.1.2.3": false, "100.64.1.1": false, "198.18.0.1": false,
		"224.0.0.1": false, "255.255.255.255": false, "240.0.0.1": false, "192.0.2.1": false,
		"::1": false, "::": false, "fe80::1": false, "fc00::1": false, "fd12::1": false, "ff02::1": false,
		"::127.0.0.1": false, "64:ff9b::7f00:1": false, "2002:7f00:1::": false, "2001::1": false, "2001:db8::1": false, "fec0::1": false,
	} {
		if got := public(netip.MustParseAddr(address).Unmap()); got != want {
			t.Errorf("public(%s) is %v", address, got)
		}
	}
}

// A name that resolves to a private address is refused at the dial, whatever it resolved to before.
func TestControlSeesTheAddressThatIsDialled(t *testing.T) {
	g, err := newGuard(nil)
	if err != nil {
		t.Fatal(err)
	}
	for address, refused := range map[string]bool{"127.0.0.1:80": true, "[::ffff:10.0.0.1]:80": true, "[fe80::1%eth0]:80": true, "1.1.1.1:443": false, "name:80": true} {
		if err := g.control("tcp", address, nil); (err != nil) != refused {
			t.Errorf("%s: %v", address, err)
		}
	}
	err = g.control("tcp", "10.1.2.3:80", nil)
	if want := "10.1.2.3 is not a public address; if the skill may reach it, add it to AGENT_ALLOW_PRIVATE_HTTP"; !strings.Contains(redact.Text(err.Error(), 0), want) {
		t.Errorf("refused with %q, want %q", err, want)
	}
}
