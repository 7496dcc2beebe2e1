package engineroom

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"

	"github.com/lanekeeper/lanekeeper/internal/origin"
	"github.com/lanekeeper/lanekeeper/principals"
)

// principalsPage lists principals with their rights, and creates principals.
func (room *Room) principalsPage() page {
	return page{
		path: "/principals", name: "principals", navLabel: "Principals", title: "Principals",
		parts: []part{
			{name: "list", load: func(ctx context.Context, _ *pageRequest) (any, error) {
				return principals.List(ctx, room.Pool)
			}},
			{name: "create", load: func(context.Context, *pageRequest) (any, error) { return principals.Roles(), nil }},
			{name: "sessions", load: func(ctx context.Context, _ *pageRequest) (any, error) {
				return principals.Sessions(ctx, room.Pool, "")
			}},
		},
	}
}

// principalPage shows one principal with its tokens, sessions and identities.
func (room *Room) principalPage() page {
	return page{
		path: "/principals/{name}", name: "principal", open: room.openPrincipal,
		parts: []part{
			{name: "facts", load: func(_ context.Context, req *pageRequest) (any, error) {
				return map[string]any{"Principal": req.Subject, "Roles": principals.Roles()}, nil
			}},
			{name: "tokens", load: func(ctx context.Context, req *pageRequest) (any, error) {
				list, err := principals.Tokens(ctx, room.Pool, req.Subject.(principals.Principal).ID)
				return map[string]any{"Principal": req.Subject, "Tokens": list}, err
			}},
			{name: "sessions", load: func(ctx context.Context, req *pageRequest) (any, error) {
				return principals.Sessions(ctx, room.Pool, req.Subject.(principals.Principal).ID)
			}},
			{name: "identities", load: func(ctx context.Context, req *pageRequest) (any, error) {
				list, err := principals.Identities(ctx, room.Pool, req.Subject.(principals.Principal).ID)
				return map[string]any{"Principal": req.Subject, "Identities": list}, err
			}},
		},
	}
}

func (room *Room) openPrincipal(ctx context.Context, req *pageRequest) (string, error) {
	p, err := principals.Find(ctx, room.Pool, req.path("name"))
	if errors.Is(err, principals.ErrNotFound) {
		return "", notFound("there is no principal %.60q", req.path("name"))
	}
	req.Subject = p
	return "Principal " + p.Name, err
}

// showSecret writes the page with a new token or login link. It does not redirect like other actions, because then a
// cookie or the URL of the page would have to carry the secret.
func (room *Room) showSecret(w http.ResponseWriter, r *http.Request, back string, body []byte) {
	var made struct{ Token, Path string } // Path is the path of a login link
	if err := json.Unmarshal(body, &made); err != nil {
		room.Refuse(w, r, err)
		return
	}
	if made.Path != "" {
		scheme := "http://"
		if origin.ViaTLS(r) {
			scheme = "https://"
		}
		made.Path = scheme + r.Host + made.Path
	}
	body, err := room.execute("secret", map[string]any{"Agent": room.Agent, "Made": made, "Back": back})
	if err != nil {
		room.Refuse(w, r, err)
		return
	}
	room.writePage(w, r, http.StatusOK, body)
}
